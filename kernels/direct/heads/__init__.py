"""The direct sweep of heads that a program holds, in Triton: no program waits for another one."""
