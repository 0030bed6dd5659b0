"""Reading of AIS files: columns, NMEA, points, splits."""
