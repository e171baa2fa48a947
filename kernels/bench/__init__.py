"""The benchmark of the kernels: each is checked, then timed, beside its peers and the limit of the chip, in one run."""
