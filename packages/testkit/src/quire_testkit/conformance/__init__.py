"""Conformance suites: one class per Protocol; an implementer supplies a factory method and inherits the tests."""
