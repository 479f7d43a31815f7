"""NCCL with two ranks, over GPU memory that ranks export to each other."""
from ranks import main

if __name__ == "__main__":
    main()
