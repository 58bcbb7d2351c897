"""How other trainers compute the policy head, re-implemented from descriptions of their schemes: the
slices, the passes and what is computed twice are theirs, the code is not. Tuning constants are the
defaults that were published; where theirs has variants, the simplest one is here.

Each scheme is a function of hidden [n, h], weight [v, h] and targets [n] that gives log-probabilities
with a gradient, but for `sequence_chunks`, which has the loss inside.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the schemes that need it are left out
    triton = None


class VocabularyChunks(torch.autograd.Function):
    """prime-rl: slices of the vocabulary, each with logits of all rows in float32, joined by a running
    maximum; log-probability and entropy. Backward computes every slice's logits again. Four
    products."""

    width = 8192

    @staticmethod
    def forward(context, hidden, weight, targets):
        rows = len(hidden)
        options = {"dtype": torch.float32, "device": hidden.device}
        greatest = torch.full((rows,), -torch.inf, **options)
        total, weighted, taken = (torch.zeros(rows, **options) for _ in range(3))
        for begin in range(0, len(weight), VocabularyChunks.width):
            part = weight[begin:begin + VocabularyChunks.width]
            logits = (hidden @ part.t()).float()
            maximum = torch.maximum(greatest, logits.amax(-1))
            scale = torch.exp(greatest - maximum)
            exponentials = torch.exp(logits - maximum[:, None])
            total = total * scale + exponentials.sum(-1)
            weighted = weighted * scale + (exponentials * logits).sum(-1)
            place = targets - begin
            inside = (place >= 0) & (place < len(part))
            found = logits.gather(1, place.clamp(0, len(part) - 1)[:, None]).squeeze(1)
            taken = torch.where(inside, found, taken)
            greatest = maximum
        normaliser = greatest + total.log()
        context.save_for_backward(hidden, weight, targets, normaliser)
        context.entropy = normaliser - weighted / total
        return taken - normaliser

    @staticmethod
    def backward(context, g):
        hidden, weight, targets, normaliser = context.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.empty_like(weight)
        for begin in range(0, len(weight), VocabularyChunks.width):
            part = weight[begin:begin + VocabularyChunks.width]
            gradient = torch.exp((hidden @ part.t()).float() - normaliser[:, None]) * -g[:, None]
            place = targets - begin
            rows = ((place >= 0) & (place < len(part))).nonzero().squeeze(1)
            gradient[rows, place[rows]] += g[rows]
            gradient = gradient.to(hidden.dtype)
            d_hidden.add_(gradient @ part)
            torch.mm(gradient.t(), hidden, out=d_weight[begin:begin + len(part)])
        return d_hidden, d_weight, None


def sequence_chunks(hidden, weight, sequences, loss_of, compiled=True):
    """Liger's fused linear GRPO with chunks of one sequence: each sequence's logits, loss and both
    gradients in one compiled function; gradients of the weight are added up. Three products.

    `sequences` are slices, loss_of(slice, logprobs) is a sequence's loss. Returns a function that gives
    (loss, d_hidden, d_weight)."""

    def chunk_loss(h, w, targets, *streams):
        logits = (h @ w.t()).float()
        logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
        return loss_of(logprobs, *streams)

    step = torch.func.grad_and_value(chunk_loss, argnums=(0, 1))
    if compiled:
        step = torch.compile(step, dynamic=False)

    def run(targets, *streams):
        d_weight, d_hidden, loss = torch.zeros_like(weight), [], 0.0
        for part in sequences:
            (d_h, d_w), value = step(hidden[part], weight, targets[part],
                                     *(stream[part] for stream in streams))
            d_weight.add_(d_w)
            d_hidden.append(d_h)
            loss = loss + value
        return loss, torch.cat(d_hidden), d_weight

    return run


if triton is not None:

    @triton.jit
    def _logits(hidden, weight, rows, columns, n, v, width: tl.constexpr, block_k: tl.constexpr):
        """A tile of logits in float32."""
        k = tl.arange(0, block_k)
        sums = tl.zeros((rows.shape[0], columns.shape[0]), dtype=tl.float32)
        for begin in range(0, width, block_k):
            h = tl.load(hidden + rows[:, None] * width + begin + k[None, :],
                        mask=rows[:, None] < n, other=0.0)
            w = tl.load(weight + columns[None, :] * width + begin + k[:, None],
                        mask=columns[None, :] < v, other=0.0)
            sums = tl.dot(h, w, sums)
        return sums

    @triton.jit
    def _split_sums(hidden, weight, targets, greatest, total, weighted, taken, n, v,
                    width: tl.constexpr, split: tl.constexpr, block_m: tl.constexpr,
                    block_n: tl.constexpr, block_k: tl.constexpr):
        """Of one tile of rows and one split of the vocabulary: the greatest logit, the sums of
        exponentials and of those times logits, and the logit of the target."""
        number, splits = tl.program_id(1), tl.num_programs(1)
        rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
        target = tl.load(targets + rows, mask=rows < n, other=-1)
        maximum = tl.full((block_m,), float("-inf"), tl.float32)
        sums = tl.zeros((block_m,), tl.float32)
        products = tl.zeros((block_m,), tl.float32)
        found = tl.zeros((block_m,), tl.float32)
        for begin in range(0, split, block_n):
            columns = number * split + begin + tl.arange(0, block_n)
            z = _logits(hidden, weight, rows, columns, n, v, width, block_k)
            found += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
            z = tl.where(columns[None, :] < v, z, float("-inf"))
            new = tl.maximum(maximum, tl.max(z, 1))
            scale = tl.exp(maximum - new)
            e = tl.exp(z - new[:, None])
            sums = sums * scale + tl.sum(e, 1)
            products = products * scale + tl.sum(tl.where(e > 0.0, e * z, 0.0), 1)
            maximum = new
        at = rows * splits + number
        tl.store(greatest + at, maximum, mask=rows < n)
        tl.store(total + at, sums, mask=rows < n)
        tl.store(weighted + at, products, mask=rows < n)
        inside = (target >= number * split) & (target < (number + 1) * split)
        tl.store(taken + rows, found, mask=(rows < n) & inside)

    @triton.jit
    def _logit_gradients(hidden, weight, targets, normalisers, g, out, first, columns_out, n, v,
                         width: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
                         block_k: tl.constexpr):
        """out[row, column - first] = g (1[target] - p), for the columns of one split."""
        rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
        local = tl.program_id(1) * block_n + tl.arange(0, block_n)
        columns = first + local
        z = _logits(hidden, weight, rows, columns, n, v, width, block_k)
        target = tl.load(targets + rows, mask=rows < n, other=-1)
        normaliser = tl.load(normalisers + rows, mask=rows < n, other=0.0)
        factor = tl.load(g + rows, mask=rows < n, other=0.0)
        hit = tl.where(columns[None, :] == target[:, None], 1.0, 0.0)
        d = factor[:, None] * (hit - tl.exp(z - normaliser[:, None]))
        tl.store(out + rows[:, None] * columns_out + local[None, :], d.to(out.dtype.element_ty),
                 mask=(rows[:, None] < n) & (local[None, :] < columns_out))

    @triton.jit
    def _tile_gradients(hidden, weight, targets, normalisers, g, d_hidden, d_weight, n, v,
                        least: tl.constexpr, width: tl.constexpr, block_m: tl.constexpr,
                        block_n: tl.constexpr, block_k: tl.constexpr):
        """Both gradients of one tile of logits, added where they belong. A tile whose probabilities
        are all below `least` is skipped."""
        rows = tl.program_id(1) * block_m + tl.arange(0, block_m)
        columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
        z = _logits(hidden, weight, rows, columns, n, v, width, block_k)
        target = tl.load(targets + rows, mask=rows < n, other=-1)
        normaliser = tl.load(normalisers + rows, mask=rows < n, other=0.0)
        factor = tl.load(g + rows, mask=rows < n, other=0.0)
        hit = tl.where(columns[None, :] == target[:, None], 1.0, 0.0)
        there = (rows[:, None] < n) & (columns[None, :] < v)
        p = tl.where(there, tl.exp(z - normaliser[:, None]), 0.0)
        if tl.max(tl.maximum(p, hit)) >= least:
            d = (factor[:, None] * (hit - p)).to(hidden.dtype.element_ty)
            k = tl.arange(0, block_k)
            for begin in range(0, width, block_k):
                w = tl.load(weight + columns[:, None] * width + begin + k[None, :],
                            mask=columns[:, None] < v, other=0.0)
                d_h = tl.dot(d, w)
                tl.atomic_add(d_hidden + rows[:, None] * width + begin + k[None, :],
                              d_h.to(d_hidden.dtype.element_ty), mask=rows[:, None] < n,
                              sem="relaxed")
                h = tl.load(hidden + rows[:, None] * width + begin + k[None, :],
                            mask=rows[:, None] < n, other=0.0)
                d_w = tl.dot(tl.trans(d), h)
                tl.atomic_add(d_weight + columns[:, None] * width + begin + k[None, :],
                              d_w.to(d_weight.dtype.element_ty), mask=columns[:, None] < v,
                              sem="relaxed")

    def _sums(hidden, weight, targets, split, blocks):
        """Log-probabilities and normalisers from the sums of all splits."""
        n, v = len(hidden), len(weight)
        splits = triton.cdiv(v, split)
        options = {"dtype": torch.float32, "device": hidden.device}
        greatest, total, weighted = (torch.empty(n, splits, **options) for _ in range(3))
        taken = torch.empty(n, **options)
        _split_sums[(triton.cdiv(n, blocks["block_m"]), splits)](
            hidden, weight, targets, greatest, total, weighted, taken, n, v, hidden.shape[1], split,
            **blocks)
        maximum = greatest.amax(1)
        normaliser = maximum + (total * torch.exp(greatest - maximum[:, None])).sum(1).log()
        return taken - normaliser, normaliser

    class SplitKernel(torch.autograd.Function):
        """verl's linear_cross_entropy: one Triton kernel over tiles of rows and splits of the vocabulary
        that keeps sums alone; backward computes each split's logits again by a kernel that leaves their
        gradient, and multiplies it by cuBLAS. Four products."""

        split, backward_split = 1024, 9504
        blocks = {"block_m": 128, "block_n": 256, "block_k": 32, "num_warps": 8, "num_stages": 3}

        @staticmethod
        def forward(context, hidden, weight, targets):
            logprobs, normaliser = _sums(hidden, weight, targets, SplitKernel.split,
                                         SplitKernel.blocks)
            context.save_for_backward(hidden, weight, targets, normaliser)
            return logprobs

        @staticmethod
        def backward(context, g):
            hidden, weight, targets, normaliser = context.saved_tensors
            n, v = len(hidden), len(weight)
            blocks = SplitKernel.blocks
            d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
            for begin in range(0, v, SplitKernel.backward_split):
                part = weight[begin:begin + SplitKernel.backward_split]
                gradient = torch.empty(n, len(part), dtype=hidden.dtype, device=hidden.device)
                grid = (triton.cdiv(n, blocks["block_m"]),
                        triton.cdiv(len(part), blocks["block_n"]))
                _logit_gradients[grid](hidden, weight, targets, normaliser, g.contiguous(), gradient,
                                       begin, len(part), n, v, hidden.shape[1], **blocks)
                if begin == 0:
                    torch.mm(gradient, part, out=d_hidden)
                else:
                    d_hidden.addmm_(gradient, part)
                torch.mm(gradient.t(), hidden, out=d_weight[begin:begin + len(part)])
            return d_hidden, d_weight, None

    class CutCrossEntropy(torch.autograd.Function):
        """Apple's cut cross entropy: no logits in memory at all. Backward computes a tile's logits again
        in one kernel, which adds its share to both gradients in place; tiles without a probability of
        2^-12 are skipped. Here without its reordering of the vocabulary, and with sums of splits
        instead of locks in the forward pass."""

        split, least = 2048, 2.0**-12
        forward_blocks = {"block_m": 128, "block_n": 128, "block_k": 32, "num_warps": 4,
                          "num_stages": 4}
        backward_blocks = {"block_m": 128, "block_n": 128, "block_k": 32, "num_warps": 8,
                           "num_stages": 3}

        @staticmethod
        def forward(context, hidden, weight, targets):
            logprobs, normaliser = _sums(hidden, weight, targets, CutCrossEntropy.split,
                                         CutCrossEntropy.forward_blocks)
            context.save_for_backward(hidden, weight, targets, normaliser)
            return logprobs

        @staticmethod
        def backward(context, g):
            hidden, weight, targets, normaliser = context.saved_tensors
            n, v = len(hidden), len(weight)
            blocks = CutCrossEntropy.backward_blocks
            d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
            grid = (triton.cdiv(v, blocks["block_n"]), triton.cdiv(n, blocks["block_m"]))
            _tile_gradients[grid](hidden, weight, targets, normaliser, g.contiguous(), d_hidden,
                                  d_weight, n, v, CutCrossEntropy.least, hidden.shape[1], **blocks)
            return d_hidden, d_weight, None


def logprob_schemes():
    """{name: function of hidden, weight and targets}, those that this installation can run."""
    found = {"prime-rl's chunks of the vocabulary, re-implemented": VocabularyChunks.apply}
    if triton is not None:
        found["verl's Triton kernel, re-implemented"] = SplitKernel.apply
        found["Apple's cut cross entropy, re-implemented"] = CutCrossEntropy.apply
    return found
