"""The web page of `anabatic serve`: `page.py` puts its pieces into one document."""
