"""What touches the world: the driver, the effects, tools and hooks; the only code that awaits."""
