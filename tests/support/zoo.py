"""Architectures that plan was not written for, each a model, a batch of the host and a task; and what plan is to say of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

ROWS, CLASSES = 8, 10
GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape):
    return torch.randn(ROWS, *shape, generator=GENERATOR)


def whole(most, *shape):
    return torch.randint(most, (ROWS, *shape), generator=GENERATOR)


def classes():
    return whole(CLASSES)


def classify(model, batch):
    inputs, targets = batch
    return {"loss": F.cross_entropy(model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets)}


# ---- attention and recurrence


class EncoderDecoder(nn.Module):
    """torch's own, whole: a causal mask, and padding on both sides."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.inner = nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        h = self.inner(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=causal,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return self.head(h.mean(1))


class MaskedAttention(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.lift = nn.Linear(8, width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(width, 4, kdim=8, vdim=8, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = self.lift(x)
        h = h + self.attention(h, h, h, attn_mask=mask, key_padding_mask=x[..., 0] > 9, average_attn_weights=False)[0]
        weighed, weights = self.cross(h, x, x)
        return self.head((h + weighed + weights.sum(-1, keepdim=True)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.gru = nn.GRU(8, width, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.lstm = nn.LSTM(2 * width, width, batch_first=True, bidirectional=True, proj_size=16)
        self.plain = nn.RNN(32, width, batch_first=True)
        self.cells = nn.ModuleList([nn.GRUCell(width, width), nn.LSTMCell(width, width)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        h = self.plain(self.lstm(self.gru(x)[0])[0])[0][:, -1]
        return self.head(self.cells[1](self.cells[0](h))[0])


class Packed(nn.Module):
    """The lengths lie on the host, as a list."""

    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(100, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(2 * width, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        lengths = [max(1, tokens.shape[1] - row) for row in range(tokens.shape[0])]
        embedded = self.embedding(tokens)
        packed = rnn.pack_padded_sequence(embedded, lengths, True, enforce_sorted=False)  # <- packing
        padded, _ = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)  # <- unpacking
        return self.head(self.lstm(padded)[0].mean(1))


class Rotary(nn.Module):
    """A decoder as they are written today: rotated queries, grouped heads, RMSNorm, SwiGLU, tied weights."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(100, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, width + width, bias=False)
        self.gate, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        frequencies = 1e4 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens):
        rows, steps = tokens.shape
        x = self.embedding(tokens)
        angles = torch.outer(torch.arange(steps, device=x.device), self.frequencies)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k, v = self.qkv(self.norms[0](x)).split([64, 32, 32], -1)
        q, k, v = (part.view(rows, steps, -1, 16).transpose(1, 2) for part in (q, k, v))
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.float().unflatten(-1, (-1, 2))) * turn).flatten(3).to(v.dtype)
            for part in (q, k)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + h.transpose(1, 2).reshape(rows, steps, -1)
        gate, up = self.gate(self.norms[1](x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return F.linear(x, self.embedding.weight).mean(1)


# ---- convolutions and norms


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)])
        self.middle = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 4 * width, 3, 2, 1))
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(4 * width, width, 4, 2, 1)]
        )
        self.norm = nn.InstanceNorm2d(2 * width, affine=True, track_running_stats=True)
        self.out = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x):
        first = self.down[0](x).relu_()
        second = F.leaky_relu(self.down[1](first), 0.1, inplace=True)
        h = self.up[0](self.middle(second))
        h = self.up[1](torch.cat((h, second), 1))
        return self.out(self.norm(torch.cat((h, first), 1)))


def denoise(model, batch):
    noise = torch.randn_like(batch["image"])
    level = torch.rand(len(noise), 1, 1, 1, device=noise.device)
    return {"loss": F.mse_loss(model(batch["image"] * (1 - level) + noise * level), noise)}


class Volumes(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv3d(1, width, 3, padding=1), nn.Conv3d(width, 2 * width, 3, 2, 1, groups=2)])
        self.norms = nn.ModuleList([nn.BatchNorm3d(width), nn.BatchNorm3d(2 * width)])
        self.drop, self.act = nn.Dropout3d(0.2), nn.PReLU(width)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        h = F.max_pool3d(self.act(self.norms[0](self.convs[0](x))), 2)
        h = F.adaptive_avg_pool3d(self.drop(self.norms[1](self.convs[1](h))), 1)
        return self.head(h.flatten(1))


class Pooled(nn.Module):
    """What shrinks, grows and moves images."""

    def __init__(self, width=16):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, padding_mode="reflect", dilation=1)
        self.unpool, self.shuffle = nn.MaxUnpool2d(2), nn.PixelShuffle(2)
        self.spread = nn.Conv2d(width, 4 * width, 1)
        self.response, self.lp = nn.LocalResponseNorm(3), nn.LPPool2d(2, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        h = self.conv(x)
        pooled, where = F.max_pool2d(h, 2, return_indices=True)
        h = h + self.unpool(pooled, where) + self.shuffle(self.spread(F.avg_pool2d(h, 2)))
        patches = F.unfold(h, 3, padding=1)
        h = h + F.fold(patches, h.shape[-2:], 3, padding=1) + torch.roll(h, 1, -1) + h.flip(2)
        h = self.lp(self.response(F.pad(h, (1, 1, 1, 1), mode="circular")))
        return self.head(F.adaptive_max_pool2d(h, 1).flatten(1))


class Warped(nn.Module):
    def __init__(self):
        super().__init__()
        self.where = nn.Linear(3 * 32 * 32, 6)
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        h = self.conv(F.grid_sample(x, grid, align_corners=False, padding_mode="border"))
        for mode in ("bilinear", "bicubic", "nearest"):
            h = F.interpolate(
                h,
                scale_factor=1.5 if mode == "nearest" else None,
                size=None if mode == "nearest" else (24, 24),
                mode=mode,
            )
        return self.head(F.interpolate(h, (12, 12), mode="area").mean((2, 3)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = parametrizations.weight_norm(nn.Linear(64, 64))
        self.spectral = parametrizations.spectral_norm(nn.Linear(64, 64))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(64, 64), orthogonal_map="householder")
        self.old_weight = nn.utils.weight_norm(nn.Linear(64, 64))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(64, 64))
        self.norm, self.head = nn.BatchNorm1d(64), nn.LazyLinear(CLASSES)
        self.head(torch.zeros(1, 64))

    def forward(self, x):
        for layer in (self.weight, self.spectral, self.orthogonal, self.old_weight, self.old_spectral):
            x = F.mish(layer(x))
        return self.head(self.norm(x))


class Fourier(nn.Module):
    """A Fourier operator: complex weights between two transforms."""

    def __init__(self, width=16, modes=6):
        super().__init__()
        self.modes = modes
        self.lift, self.head = nn.Conv2d(3, width, 1), nn.Linear(width, CLASSES)
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.complex64) / width)

    def forward(self, x):
        h = self.lift(x)
        waves = torch.fft.rfft2(h.float())
        out = torch.zeros_like(waves)
        out[..., : self.modes, : self.modes] = torch.einsum(
            "bixy,ioxy->boxy", waves[..., : self.modes, : self.modes], self.weight
        )
        power = torch.fft.fftshift(waves.abs() + waves.angle())
        h = h + torch.fft.irfft2(out, s=h.shape[-2:]) + power.mean()
        spectrum = torch.stft(h.mean((1, 2)), 16, window=torch.hann_window(16, device=h.device), return_complex=True)
        return self.head(h.mean((2, 3))) + spectrum.real.mean()


# ---- functions


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.sign(x) * scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1) * ctx.scale, None


class Rounding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, CLASSES)

    def forward(self, x):
        h = Straight.apply(self.first(x), 2.0)
        h = h + (torch.round(h * 8) / 8 - h).detach()
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-1, 1))
        return self.second(h)


class Recomputed(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.lift = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.lift(x)
        for index, block in enumerate(self.blocks[:2]):
            x = x + checkpoint(block, x, use_reentrant=index == 0)
        x = checkpoint_sequential(list(self.blocks[2:]), 2, x, use_reentrant=False)
        return self.head(x).mean(1)


class Functional(nn.Module):
    """Gradients inside of the model: an inner step of learning for each row, and a derivative by the input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.energy = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        weights = dict(self.inner.named_parameters())

        def loss(weights, row):
            return (torch.func.functional_call(self.inner, weights, (row,)) - row).square().mean()

        def adapted(row):
            grads = torch.func.grad(loss)(weights, row)
            moved = {name: weights[name] - 0.1 * grads[name] for name in weights}
            return torch.func.functional_call(self.inner, moved, (row,))

        h = torch.func.vmap(adapted)(x)
        with torch.enable_grad():
            h = h if h.requires_grad else h.requires_grad_()
            (force,) = torch.autograd.grad(self.energy(h).sum(), h, create_graph=self.training)
        return self.head(h - force)


class Ensemble(nn.Module):
    """Members of one shape, computed at once; and a slow copy as a teacher."""

    def __init__(self):
        super().__init__()
        members = [nn.Linear(64, CLASSES) for _ in range(4)]
        weights, _ = torch.func.stack_module_state(members)
        self.weights = nn.ParameterDict({name: nn.Parameter(value.detach()) for name, value in weights.items()})
        self.shape = [nn.Linear(64, CLASSES, device="meta")]
        self.student = nn.Linear(64, CLASSES)

    def forward(self, x):
        outputs = torch.func.vmap(
            lambda weights: torch.func.functional_call(self.shape[0], weights, (x,)), randomness="different"
        )(dict(self.weights))
        teacher = copy.deepcopy(self.student)
        with torch.no_grad():
            target = teacher(x)
        return outputs.mean(0) + self.student(x) - target


def penalised(model, batch):
    """Double backward, as in a GAN's gradient penalty."""
    inputs, targets = batch
    with torch.enable_grad():
        inputs = inputs.detach().requires_grad_()
        logits = model(inputs)
        (grad,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
    penalty = (grad.flatten(1).norm(2, 1) - 1).square().mean()
    return {"loss": F.cross_entropy(logits, targets) + penalty, "penalty": penalty}


class Indexed(nn.Module):
    """Writes in place, by index, by a scatter; sorts and counts."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding, self.bag = nn.Embedding(100, width), nn.EmbeddingBag(100, width, mode="mean", padding_idx=0)
        self.sums = nn.EmbeddingBag(100, width, mode="sum")
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("counts", torch.zeros(100))

    def forward(self, tokens):
        flat = tokens.flatten()
        x = self.embedding(tokens)
        with torch.no_grad():
            self.counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
            self.counts[flat[0]] += 1  # <- counting
        place = torch.arange(0, flat.numel(), tokens.shape[1], device=tokens.device)
        h = self.bag(tokens) + self.sums(flat, place, per_sample_weights=torch.ones_like(flat, dtype=x.dtype))
        order = tokens.argsort(dim=-1, stable=True)
        x = x.gather(1, order[..., None].expand_as(x))
        best, where = x.norm(dim=-1).topk(4)
        x = x.clone()
        x[:, 0] = 0
        x[:, 1:3].mul_(2).add_(1)
        x.index_put_((torch.arange(len(x), device=x.device), where[:, 0]), best[:, :1].expand(-1, x.shape[-1]))
        spread = torch.zeros(len(x), 100, device=x.device, dtype=x.dtype)
        spread = spread.scatter_reduce(1, tokens, x.mean(-1), "amax").scatter_add(1, tokens, x.sum(-1))
        one = F.one_hot(tokens, 100).to(x.dtype).mean(1)
        ends = torch.searchsorted(torch.linspace(-1, 1, 9, device=x.device), spread.clamp(-1, 1).contiguous())
        h = h + x.cumsum(1)[:, -1] + (spread + one).sort(-1)[0][:, : h.shape[1]] + ends.to(x.dtype).mean(1, True)
        return self.head(h.where(h > 0, torch.zeros_like(h)) + x.cumprod(1).amax(1) + x.logcumsumexp(1).median(1)[0])


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(4, 16, 3, padding=1)
        self.drops = nn.ModuleList(
            [nn.Dropout(), nn.Dropout1d(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.RReLU(), nn.Softplus()]
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.lift(x)
        for drop in self.drops:
            x = drop(x)
        if self.training:
            keep = torch.empty(len(x), 1, 1, device=x.device).bernoulli_(0.9)
            x = x * keep / 0.9 + torch.randn_like(x) * 0.1 + torch.rand_like(x)
            x = x[torch.randperm(len(x), device=x.device)]
        return F.gumbel_softmax(self.head(F.glu(torch.cat((x, x), 1), 1).mean(-1)), tau=0.5)


class Distances(nn.Module):
    """A codebook with the nearest entry taken, a kernel over distances, and small matrices solved."""

    def __init__(self, width=16):
        super().__init__()
        self.lift, self.head = nn.Linear(64, width), nn.Linear(width, CLASSES)
        self.codes = nn.Parameter(torch.randn(32, width))
        self.bilinear, self.cosine = nn.Bilinear(width, width, width), nn.CosineSimilarity()

    def forward(self, x):
        h = self.lift(x)
        codes = self.codes.to(h.dtype)
        distances = torch.cdist(h.float(), codes.float())
        h = h + (codes[distances.argmin(1)] - h).detach() + torch.softmax(-distances, 1).to(codes.dtype) @ codes
        gram = torch.einsum("bi,bj->ij", h, h).float() + 99 * torch.eye(h.shape[1], device=h.device)
        h = (
            h.float() @ torch.linalg.solve_ex(gram, torch.linalg.cholesky_ex(gram)[0])[0]
            + torch.linalg.qr(gram)[0].mean()
        )
        return self.head(self.bilinear(h, h) + self.cosine(h, h)[:, None] + torch.logsumexp(distances, 1, True))


class Hypernet(nn.Module):
    """Weights made by a network, a convolution for each row; numbers of a schedule kept on the host."""

    def __init__(self):
        super().__init__()
        self.make, self.head = nn.Linear(3, 8 * 3 * 9), nn.Linear(8, CLASSES)
        self.schedule = [0.1 * step for step in range(10)]

    def forward(self, x):
        weights = self.make(x.mean((2, 3))).view(-1, 3, 3, 3)
        h = F.conv2d(x.reshape(1, -1, *x.shape[2:]), weights, padding=1, groups=len(x)).view(len(x), 8, -1)
        scale = torch.tensor(self.schedule).mean()
        return self.head(h.mean(-1) * scale)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


class Mixture(nn.Module):
    """Experts without asking who got what: each sees all rows, weighed."""

    def __init__(self, width=64, experts=4):
        super().__init__()
        self.router, self.head = nn.Linear(width, experts), nn.Linear(width, CLASSES)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(len(x), self.up.shape[0], device=x.device, dtype=weights.dtype).scatter(1, chosen, weights)
        h = torch.bmm(x.expand(len(self.up), -1, -1), self.up).relu()
        return self.head(torch.baddbmm(x.expand(len(self.up), -1, -1), h, self.down).mul(gates.T[..., None]).sum(0))


# ---- losses


class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 32, 5, 2, 2), nn.Linear(32, 20)

    def forward(self, x):
        return self.head(self.conv(x).relu().transpose(1, 2))


def transcribe(model, batch):
    log_probs = model(batch["sound"]).log_softmax(-1).transpose(0, 1)
    steps, rows = log_probs.shape[:2]
    lengths = torch.full((rows,), steps, dtype=torch.long)
    longest = torch.full((rows,), batch["text"].shape[1])
    return {"loss": F.ctc_loss(log_probs, batch["text"], lengths, longest, zero_infinity=True)}  # <- ctc


def many_losses(model, batch):
    inputs, targets = batch
    logits = model(inputs)
    one, two, other = logits.flatten(1), logits.flip(0), logits.roll(1, 0)
    hot = F.one_hot(targets, CLASSES).to(logits.dtype)
    sign = hot[:, 0] * 2 - 1
    losses = [
        nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)(logits, targets),
        nn.CrossEntropyLoss(weight=torch.ones(CLASSES, device=logits.device))(logits, hot),
        nn.NLLLoss()(logits.log_softmax(-1), targets),
        nn.BCEWithLogitsLoss(pos_weight=hot.mean(0) + 1)(logits, hot),
        nn.KLDivLoss(reduction="batchmean")(logits.log_softmax(-1), two.softmax(-1)),
        nn.SmoothL1Loss()(logits, two),
        nn.HuberLoss()(logits, two),
        nn.L1Loss()(logits, two),
        nn.TripletMarginLoss()(one, two, other),
        nn.CosineEmbeddingLoss()(one, two, sign),
        nn.MarginRankingLoss()(one[:, 0], two[:, 0], sign),
        nn.HingeEmbeddingLoss()(one, hot * 2 - 1),
        nn.SoftMarginLoss()(one, hot * 2 - 1),
        nn.MultiLabelSoftMarginLoss()(logits, hot),
        nn.PoissonNLLLoss()(logits, hot),
        nn.GaussianNLLLoss()(logits, hot, torch.ones_like(logits)),  # <- variance
    ]
    return {"loss": torch.stack([loss.float() for loss in losses]).sum()}


# ---- optimizers


class Lion(torch.optim.Optimizer):
    """By the sign of a mean (Chen et al. 2023), written as a person would."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                first, second = group["betas"]
                parameter.add_(mean.lerp(parameter.grad, 1 - first).sign_(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 1 - second)


class Wide(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, x):
        return self.layers(x)


class Scaled(Wide):
    """A value is read, and only reckoned with."""

    def forward(self, x):
        most = x.abs().max().item()  # <- scaled
        return super().forward(x / (2 * most) + 1 / most)


# ---- what goes by values


class Branching(Wide):
    def forward(self, x):
        if x.sum() > 0:  # <- branch
            x = -x
        return super().forward(x)


class Masking(Wide):
    def forward(self, x):
        y = super().forward(x)
        good = y[y[:, 0] > 0]  # <- mask
        return y + good.mean()


class Nonzero(Wide):
    def forward(self, x):
        y = super().forward(x)
        return y + y.flatten()[torch.nonzero(y.flatten() > 0)].mean()  # <- nonzero


class Unique(Wide):
    def forward(self, x):
        y = super().forward(x)
        return y + torch.unique((y * 8).round().detach()).mean()  # <- unique


class SizeOf(Wide):
    def forward(self, x):
        width = int(x[0, 0].abs() * 8) + 1  # <- size
        return super().forward(x) + torch.ones(width, device=x.device).mean()


class ItemSize(Wide):
    def forward(self, x):
        width = x[0, 0].abs().ceil().long().item() + 1
        return super().forward(x) + torch.ones(len(x), width, device=x.device).mean()  # <- item as a size


class Waiting(Wide):
    def forward(self, x):
        y = x
        while y.norm() > 1:  # <- while
            y = y / 2
        return super().forward(y)


class Ranging(Wide):
    def forward(self, x):
        for _ in range(x.argmax() % 3):  # <- range
            x = x / 2
        return super().forward(x)


class ItemBranch(Wide):
    def forward(self, x):
        if x.mean().item() > 0.5:  # <- item in if
            x = -x
        return super().forward(x)


class Selecting(Wide):
    def forward(self, x):
        y = super().forward(x)
        return y + torch.masked_select(y, y > 0).mean()  # <- masked_select


class Repeating(Wide):
    def forward(self, x):
        counts = (x[:, 0] > 0).long() + 1
        return super().forward(x) + x.repeat_interleave(counts, 0).mean()  # <- repeat


class Listing(Wide):
    def forward(self, x):
        sizes = (x[:, 0] > 0).long().add(1).tolist()
        return super().forward(x) + torch.cat([x[:1].expand(size, -1) for size in sizes]).mean()  # <- tolist


class Counting(Wide):
    def forward(self, x):
        return super().forward(x) + torch.bincount(x.argmax(1)).float().mean()  # <- bincount


class Where(Wide):
    def forward(self, x):
        rows, columns = torch.where(x > 0)  # <- where
        return super().forward(x) + x[rows, columns].mean()


class Experts(Wide):
    """A mixture as it is most often written: each expert is given its rows."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)  # <- experts
            out = out.index_add(0, rows, expert(x[rows]))
        return super().forward(out)


class Padded(Wide):
    """The lengths lie on the device."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 64, batch_first=True)

    def forward(self, x):
        lengths = (x > 0).sum(1).clamp(min=1).cpu()
        packed = rnn.pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False)  # <- lengths
        return super().forward(self.gru(packed)[1][0])


# ---- the table


def vectors():
    return numbers(64), classes()


def images():
    return numbers(3, 32, 32), classes()


@dataclass(frozen=True)
class Case:
    """waits: the marks of lines that truly read the device or wait for it; "torch" for those of torch's own code.

    A case of BY_VALUES has its name as the mark of the line that is to be told.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any] = vectors
    task: Callable[..., Any] = classify
    optimizer: str = "adam"
    waits: tuple[str, ...] = ()


SOUND = [
    Case("encoder and decoder", EncoderDecoder, lambda: ((whole(100, 48), whole(100, 40)), classes())),
    Case("attention with masks", MaskedAttention, lambda: (numbers(48, 8), classes())),
    Case("recurrent", Recurrent, lambda: (numbers(32, 8), classes())),
    Case("packed", Packed, lambda: (whole(100, 32), classes()), waits=("packing", "unpacking")),
    Case("decoder", Rotary, lambda: (whole(100, 64), classes())),
    Case("unet", UNet, lambda: {"image": numbers(3, 32, 32)}, denoise),
    Case("volumes", Volumes, lambda: (numbers(1, 16, 16, 16), classes())),
    Case("pooled", Pooled, images),
    Case("warped", Warped, images),
    Case("normed", Normed),
    Case("fourier", Fourier, images),
    Case("rounding", Rounding),
    Case("recomputed", Recomputed, lambda: (numbers(64, 64), classes())),
    Case("functional", Functional, lambda: (numbers(16), classes())),
    Case("ensemble", Ensemble),
    Case("penalty", Wide, task=penalised),
    Case("indexed", Indexed, lambda: (whole(100, 32), classes()), waits=("counting",)),
    Case("dropping", Dropping, lambda: (numbers(4, 64), classes())),
    Case("distances", Distances),
    Case("hypernet", Hypernet, images),
    Case("scripted", Scripted),
    Case("mixture", Mixture),
    Case("ctc", Frames, lambda: {"sound": numbers(8, 128), "text": whole(19, 12) + 1}, transcribe, waits=("ctc",)),
    Case("losses", Wide, task=many_losses, waits=("variance",)),
    Case("scaled", Scaled, waits=("scaled",)),
    *(
        Case(name, Wide, optimizer=name)
        for name in ("adamw", "foreach", "sgd", "nesterov", "rmsprop", "adagrad", "adadelta", "nadam", "radam", "rprop")
    ),
    *(Case(name, Wide, optimizer=name) for name in ("adamax", "lion")),
    *(Case(name, Wide, optimizer=name, waits=("torch",)) for name in ("asgd", "adafactor")),
]

BY_VALUES = [
    Case("branch", Branching),
    Case("mask", Masking),
    Case("nonzero", Nonzero),
    Case("unique", Unique),
    Case("size", SizeOf),
    Case("item as a size", ItemSize),
    Case("while", Waiting),
    Case("range", Ranging),
    Case("item in if", ItemBranch),
    Case("masked_select", Selecting),
    Case("repeat", Repeating),
    Case("tolist", Listing),
    Case("bincount", Counting),
    Case("where", Where),
    Case("experts", Experts),
    Case("lengths", Padded),
]

OPTIMIZERS = {
    "adam": "torch.optim.Adam",
    "adamw": "torch.optim.AdamW",
    "foreach": "torch.optim.AdamW, foreach: true, amsgrad: true",
    "sgd": "torch.optim.SGD, momentum: 0.9",
    "nesterov": "torch.optim.SGD, momentum: 0.9, nesterov: true, fused: true",
    "rmsprop": "torch.optim.RMSprop, momentum: 0.9, centered: true",
    "adagrad": "torch.optim.Adagrad",
    "adadelta": "torch.optim.Adadelta",
    "nadam": "torch.optim.NAdam",
    "radam": "torch.optim.RAdam",
    "adamax": "torch.optim.Adamax",
    "asgd": "torch.optim.ASGD",
    "rprop": "torch.optim.Rprop",
    "adafactor": "torch.optim.Adafactor",
    "lion": "zoo.Lion",
}


#: for device=cpu: its operations are compared with a real step's, one by one, and its memory with the allocator's
COMPARED = [
    ("encoder and decoder", "fp32"),
    ("encoder and decoder", "bf16"),
    ("attention with masks", "fp32"),
    ("decoder", "fp32"),
    ("decoder", "bf16"),
    ("volumes", "fp32"),
    ("recomputed", "fp32"),
    ("functional", "fp32"),
    ("mixture", "fp32"),
    ("rprop", "fp32"),
]
#: tried in bf16 beside fp32
IN_HALVES = ("encoder and decoder", "recurrent", "packed", "decoder", "unet", "recomputed", "ensemble", "mixture")
ON_MPS = ("decoder", "unet", "fourier", "recomputed", "functional", "indexed", "dropping", "distances", "ctc", "losses")


def words(optimizer, precision):
    """The words of a run, but for its case."""
    groups = [f"{group}=zoo" for group in ("model", "task", "data")]
    return [*groups, f"optimizer=zoo_{optimizer}", f"train.precision={precision}", "data.num_workers=0"]


def write_conf(folder):
    for group in ("model", "task", "data"):
        name = "case" if group == "data" else "name"
        (folder / "conf" / group).mkdir(parents=True, exist_ok=True)
        (folder / "conf" / group / "zoo.yaml").write_text(f"_target_: zoo.{group}\n{name}: ???\n")
    (folder / "conf" / "optimizer").mkdir(exist_ok=True)
    for name, target in OPTIMIZERS.items():
        text = f"_target_: {target}\n_partial_: true\nlr: 0.001\n".replace(", ", "\n")
        (folder / "conf" / "optimizer" / f"zoo_{name}.yaml").write_text(text)


def case_of(name):
    return next(case for case in (*SOUND, *BY_VALUES) if case.name == name)


def model(name):
    """For conf/model/zoo.yaml."""
    return case_of(name).make()


def task(name):
    return case_of(name).task


def data(case):
    return {"train": Given(case_of(case).batch), "val": Given(case_of(case).batch)}


class Given(torch.utils.data.Dataset):
    """Its own collate_fn makes what the task takes."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index

    def collate_fn(self, _):
        return self.batch()


def marked_line(name: str) -> str:
    """zoo.py:42, the line that ends with `# <- name`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (index for index, line in enumerate(lines, 1) if line.endswith(f"# <- {name}"))
    return f"{Path(__file__).name}:{number}"
