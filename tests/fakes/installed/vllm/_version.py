__version__ = version = "0.99.0"
