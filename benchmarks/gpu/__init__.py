"""What only a GPU can show: ``make gpu`` runs it all in under ten minutes and writes ``docs/explanation/gpu.md``.

Each part is a module with one function ``measure(setting, note)``, which runs in a process of its own, so that a part
that hangs or loses the device costs only itself. Without a GPU each is skipped by name, and its code runs on the CPU
with small sizes.
"""
