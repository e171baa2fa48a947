"""The script that compute-sanitizer is given: it launches every kernel, and does not say yes to what is wrong."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import sanitize
import torch
from emulator import runtime
from longscan.kernels.variants import OPERATORS

FOLDERS = {"ssd": "ssd", "causal_conv1d": "conv1d", "rms_norm": "norm", "gated_rms_norm": "norm", "pool": "pool", "logprob": "logprob"}
MODULES = {folder: runtime.load(folder) for folder in OPERATORS}


def emulated(operator: str, *values: Any, **named: Any) -> Any:
    defaults = {"z_THP": None, "dt_limit": (0.0, float("inf"))} if operator == "ssd" else {}
    return getattr(MODULES[FOLDERS[operator]], operator)(*values, **defaults, **named)


def test_every_kernel_is_launched_and_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched = set()
    for folder, module in MODULES.items():
        launch = module.ct.launch

        def noted(stream: object, grid: Any, kernel: Any, arguments: Any, launch: Any = launch, folder: str = folder) -> None:
            launched.add(f"{folder}.{kernel.function.__name__}")
            launch(stream, grid, kernel, arguments)

        monkeypatch.setattr(module.ct, "launch", noted)
    assert sanitize.main([], emulated, "cpu") == 0
    assert "WRONG" not in capsys.readouterr().out
    written = set()
    for folder in OPERATORS:
        module = importlib.import_module(f"longscan.kernels.{folder}.cutile")
        written |= {f"{folder}.{name}" for name, value in vars(module).items() if isinstance(value, module.ct.kernel)}
    assert launched == written


@pytest.mark.parametrize("operator", FOLDERS)
def test_what_is_wrong_is_told(operator: str, capsys: pytest.CaptureFixture[str]) -> None:
    def nearly(asked: str, *values: Any, **named: Any) -> Any:
        found = emulated(asked, *values, **named)
        if asked == operator:
            first = found[0] if isinstance(found, tuple) else found
            (first if isinstance(first, torch.Tensor) else first.documents["mean"])[-64 * 2 + 1 :][:1] += 0.5
        return found

    name = {"causal_conv1d": "conv1d", "rms_norm": "norm", "gated_rms_norm": "norm"}.get(operator, operator)
    assert sanitize.main([name], nearly, "cpu") == 1
    assert "WRONG" in capsys.readouterr().out


def test_an_unknown_operator_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["sdd"], emulated, "cpu") == 2
    assert "found sdd" in capsys.readouterr().err
