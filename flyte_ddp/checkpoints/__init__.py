"""What a run keeps, and where: checkpoints, their writing, reading, resharding and owner.

What supervisors need of it is here and in ownership.py, and imports no torch.
"""

MODEL_STATE = "model_state.pt"  # the trained model's file, beside the checkpoints
WRITE_GRACE = 20.0  # seconds in which a checkpoint that is being written may be completed after a rank has failed
