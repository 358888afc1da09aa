"""The granitemoeshared network."""
