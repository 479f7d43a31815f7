"""NCCL with two ranks, in CUDA graphs."""
from ranks import main

if __name__ == "__main__":
    main(graph=True)
