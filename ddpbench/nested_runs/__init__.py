"""ddpbench command lines that ddpbench runs itself: checked, measured alone, measured in turns."""
