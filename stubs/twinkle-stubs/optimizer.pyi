# Written by `twinkle plugins types`; do not edit.
"""Optimizers by name. The contract is torch's: built from parameter groups, with `step`, `zero_grad`, `state_dict`."""

from twinkle._registry import lazy_names


from torch.optim import ASGD as ASGD
from torch.optim import Adadelta as Adadelta
from torch.optim import Adafactor as Adafactor
from torch.optim import Adagrad as Adagrad
from torch.optim import Adam as Adam
from torch.optim import AdamW as AdamW
from torch.optim import Adamax as Adamax
from torch.optim import LBFGS as LBFGS
from torch.optim import NAdam as NAdam
from torch.optim import RAdam as RAdam
from torch.optim import RMSprop as RMSprop
from torch.optim import Rprop as Rprop
from torch.optim import SGD as SGD
from torch.optim import SparseAdam as SparseAdam
from twinkle_transformers.muon import Muon as Muon
