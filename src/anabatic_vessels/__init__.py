"""Vessel trajectories: AIS files to words, training and use of classifiers, maps."""

from anabatic.core.extras import OPTIONAL_PACKAGES

OPTIONAL_PACKAGES |= {
    "h3": ("h3", "vessels"),
    "sklearn": ("scikit-learn", "vessels"),
    "folium": ("folium", "vessels"),
    "pyais": ("pyais", "nmea"),
}
