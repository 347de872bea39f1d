"""A CUDA device without a GPU: libraries in NVIDIA's place, on which the CUDA build of torch runs."""
