"""The parts of tools/export_model.py: trace (what ran), rules (what each aten op is), sizes (how sizes depend on batch and
length), graph (aten calls to ops of model.json), named (the ops that model.json has a name for)."""
