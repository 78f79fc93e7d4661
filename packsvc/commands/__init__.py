"""The commands: each parses its flags, calls one function of a room, and prints what that gives back."""
