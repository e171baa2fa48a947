"""What is done, and who may say so: attempts at a shard and its report, the gate that late ones do not pass, the lock of a run."""
