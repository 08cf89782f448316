import torch

NAME = "parallel of the project"


def sizes():
    return torch.ones(64)
