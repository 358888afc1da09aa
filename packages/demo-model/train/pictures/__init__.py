"""Pictures drawn for training the companion that sees, and what can be asked about them.

`scenes` decides what stands in a picture and keeps held-out material out of training, `drawing` draws it, `labels` says
what its patches show, `questions` asks, `conversations` and `stream` hand it to training.
"""
