"""The same as resnet.py, with the workers of its DataLoader spawned."""
import os

os.environ["JOB_START"] = "spawn"

import resnet

if __name__ == "__main__":
    resnet.main()
