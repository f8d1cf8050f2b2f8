# Written by `twinkle plugins types`; do not edit.
"""Learning-rate schedulers by name. The contract is torch's: built from an optimizer, with `step` and `state_dict`."""

from twinkle._registry import lazy_names


from torch.optim.lr_scheduler import ChainedScheduler as ChainedScheduler
from torch.optim.lr_scheduler import ConstantLR as ConstantLR
from torch.optim.lr_scheduler import CosineAnnealingLR as CosineAnnealingLR
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts as CosineAnnealingWarmRestarts
from torch.optim.lr_scheduler import CyclicLR as CyclicLR
from torch.optim.lr_scheduler import ExponentialLR as ExponentialLR
from torch.optim.lr_scheduler import LambdaLR as LambdaLR
from torch.optim.lr_scheduler import LinearLR as LinearLR
from torch.optim.lr_scheduler import MultiStepLR as MultiStepLR
from torch.optim.lr_scheduler import MultiplicativeLR as MultiplicativeLR
from torch.optim.lr_scheduler import OneCycleLR as OneCycleLR
from torch.optim.lr_scheduler import PolynomialLR as PolynomialLR
from torch.optim.lr_scheduler import ReduceLROnPlateau as ReduceLROnPlateau
from torch.optim.lr_scheduler import SequentialLR as SequentialLR
from torch.optim.lr_scheduler import StepLR as StepLR
from twinkle_transformers.schedulers import ConstantWarmupScheduler as ConstantWarmupScheduler
from twinkle_transformers.schedulers import CosineRestartsWarmupScheduler as CosineRestartsWarmupScheduler
from twinkle_transformers.schedulers import CosineWarmupScheduler as CosineWarmupScheduler
from twinkle_transformers.schedulers import InverseSqrtWarmupScheduler as InverseSqrtWarmupScheduler
from twinkle_transformers.schedulers import LinearWarmupScheduler as LinearWarmupScheduler
from twinkle_transformers.schedulers import PolynomialWarmupScheduler as PolynomialWarmupScheduler
from twinkle_transformers.schedulers import WSDScheduler as WSDScheduler
