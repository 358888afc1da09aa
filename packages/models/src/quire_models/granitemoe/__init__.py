"""The granitemoe network."""
