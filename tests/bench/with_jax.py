"""JAX: the steps of an epoch as one jitted scan, their losses and accuracies kept on the device. Nothing is logged: the limit of JAX.

Only for the network of size mlp, written out; the weights are initialized like the other peers'.
"""

from __future__ import annotations

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import torch
from work import LEARNING_RATE, SEED, WARM_STEPS, Clock, arguments, arrays, network, tell

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def main() -> None:
    work = arguments()
    if work.size != "mlp" or work.log_every or work.threads != 1:
        sys.exit("with_jax.py has the mlp, on one thread, with --log-every 0")
    model = network(work)
    inputs, targets = map(jnp.asarray, arrays(work.size))
    weights = {name: jnp.asarray(value.detach().numpy()) for name, value in model.named_parameters()}
    zeros = jax.tree.map(jnp.zeros_like, weights)

    def loss_of(weights, x, y):
        hidden = jax.nn.relu(x @ weights["0.weight"].T + weights["0.bias"])
        logits = hidden @ weights["2.weight"].T + weights["2.bias"]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
        return losses.mean(), (logits.argmax(1) == y).mean()

    def step(state, rows):
        weights, means, squares, count = state
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, inputs[rows], targets[rows])
        count += 1
        means = jax.tree.map(lambda mean, grad: BETA1 * mean + (1 - BETA1) * grad, means, grads)
        squares = jax.tree.map(lambda square, grad: BETA2 * square + (1 - BETA2) * grad * grad, squares, grads)

        def moved(weight, mean, square):
            root = jnp.sqrt(square / (1 - BETA2**count)) + EPS
            return weight - LEARNING_RATE * mean / (1 - BETA1**count) / root

        return (jax.tree.map(moved, weights, means, squares), means, squares, count), jnp.stack([loss, accuracy])

    scan = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))
    draw = np.random.default_rng(SEED)
    steps_an_epoch = len(inputs) // work.batch_size
    state = weights, zeros, zeros, jnp.float32(0)
    clock = Clock(work)
    clock.begin()
    left = [min(WARM_STEPS, work.steps)]
    while sum(left) < work.steps:
        left.append(min(steps_an_epoch, work.steps - sum(left)))
    warm = {num: scan.lower(state, jnp.zeros((num, work.batch_size), jnp.int32)).compile() for num in set(left)}
    for num in left:
        clock.tick()
        rows = draw.permutation(len(inputs))[: num * work.batch_size].reshape(num, work.batch_size)
        state, metrics = warm[num](state, jnp.asarray(rows, jnp.int32))
        metrics.block_until_ready()
        clock.num_steps += num - 1
    clock.end()
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state[0].items()})
    tell(work, clock, model)


main()
