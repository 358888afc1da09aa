"""One model on several devices, processes and hosts: its settings, its ranks and its engines."""
