"""What a command accepts, and how its line is read: options, arguments, help pages."""
