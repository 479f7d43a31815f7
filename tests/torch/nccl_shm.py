"""NCCL with two ranks, over host memory."""
from ranks import main

if __name__ == "__main__":
    main(NCCL_P2P_DISABLE="1")
