"""The backend that trains and samples with torch: a pool of adapters on one frozen base model."""
