"""`anabatic launch` and its forms for hosts, Kubernetes and Ray."""
