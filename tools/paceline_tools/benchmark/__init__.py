"""What `paceline bench` is made of: prompts, methods, measurements, figures, and how they are shown."""
