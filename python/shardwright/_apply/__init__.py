"""The modules that `emit --to fsdp2` writes, as a part of the package."""
