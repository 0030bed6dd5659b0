"""`--auto`: what a training chooses by itself, and what it does when memory runs out."""
