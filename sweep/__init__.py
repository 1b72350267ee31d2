"""vllm-sweep: finds the vLLM flags that serve a model best on the machine at hand."""

__version__ = "0.1.0"
