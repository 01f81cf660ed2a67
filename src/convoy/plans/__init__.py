"""Which part of every layer's work each device does, and what must be sent between layers for it."""
