"""Triton kernels of synchronized batch normalization, each beside the function that launches it.

Every input is viewed as ``(N, C, S)``: batch, channels, and the product of the spatial sizes. One
strided body per kernel serves contiguous, channels-last and two-dimensional input.

===================  =======================================================  ====================
launcher             computes                                                 full-size traffic
===================  =======================================================  ====================
``channel_stats``    count, mean and sum of squares of this rank, packed      read x
``normalize``        y, statistics for backward, the running statistics       read x, write y
``backward_reduce``  two sums of the gradient, and the parameters' gradients  read x, dy
``backward_input``   dx                                                       read x, dy, write dx
===================  =======================================================  ====================

The package is a leaf: it imports torch, triton and its own siblings, and nothing here communicates
or knows of autograd. Importing it alone does not import triton.
"""
