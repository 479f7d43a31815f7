"""NCCL with two ranks, over GPU memory by the older calls (cuIpc)."""
from ranks import main

if __name__ == "__main__":
    main(NCCL_CUMEM_ENABLE="0")
