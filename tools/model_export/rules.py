"""What each aten op is. An op that no list names is refused: a new function is a word in one of them.

The lists name packets of overloads ("add" is add.Tensor, add.Scalar and in place add_); backward formulas are ops like others.
"""

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry


class Unsupported(Exception):
    """What model.json has no words for."""


def words(text):
    return frozenset(text.split())


# The same numbers in the same place: no kernel runs forward.
VIEWS = words("""view _unsafe_view reshape _reshape_alias t transpose permute expand expand_as unsqueeze squeeze slice select split
    split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk unbind narrow as_strided alias detach unfold diagonal
    movedim swapaxes view_as lift_fresh numpy_T flatten unflatten""")
# Allocations and questions of shape.
FREE = words("""empty empty_like new_empty empty_strided new_empty_strided resize set_ is_same_size sym_size sym_stride sym_numel
    sym_storage_offset _assert_async _assert_scalar _assert_tensor_metadata record_stream""")
ELEMENTWISE = words("""add sub rsub mul div true_divide floor_divide remainder fmod pow square sqrt rsqrt reciprocal neg abs sign sgn
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid
    logit log_sigmoid_forward log_sigmoid_backward xlogy logaddexp logaddexp2 relu relu6 gelu silu mish elu celu selu leaky_relu
    hardtanh hardswish hardsigmoid hardshrink softshrink softplus threshold clamp clamp_min clamp_max clip floor ceil round trunc frac
    maximum minimum fmax fmin lerp addcmul addcdiv where masked_fill eq ne lt le gt ge logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ isnan isinf
    isfinite nan_to_num _prelu_kernel prelu rrelu_with_noise native_dropout bernoulli sinc hypot heaviside polar i0
    tanh_backward sigmoid_backward threshold_backward gelu_backward silu_backward mish_backward elu_backward leaky_relu_backward
    hardtanh_backward hardswish_backward hardsigmoid_backward hardshrink_backward softshrink_backward softplus_backward
    native_dropout_backward _prelu_kernel_backward rrelu_with_noise_backward glu glu_backward glu_jvp masked_scale
    fill zero zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full scalar_tensor arange linspace rand rand_like
    randn randn_like randint randperm uniform normal random exponential eye tril triu tril_indices triu_indices
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward upsample_linear1d_backward
    upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward
    _upsample_bicubic2d_aa_backward
    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    grid_sampler_2d grid_sampler_2d_backward channel_shuffle native_channel_shuffle""")
COPIES = words("""clone _to_copy copy contiguous cat stack constant_pad_nd repeat roll flip slice_scatter select_scatter diagonal_scatter
    as_strided_scatter slice_backward select_backward diagonal_backward unfold_backward repeat_interleave reflection_pad1d
    reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d reflection_pad1d_backward
    reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    pixel_shuffle pixel_unshuffle im2col col2im _local_scalar_dense lift rot90 diag_embed split_copy expand_copy view_copy""")
REDUCTIONS = words("""sum mean var std var_mean std_mean amax amin argmax argmin max min prod any all norm linalg_vector_norm logsumexp
    cumsum cumprod logcumsumexp _logcumsumexp count_nonzero aminmax nansum native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit cudnn_batch_norm
    cudnn_batch_norm_backward _batch_norm_with_update batch_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _weight_norm_interface _weight_norm_interface_backward""")
SOFTMAX = words("""_softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward""")
GATHERS = words("""embedding embedding_dense_backward index index_put _unsafe_index _unsafe_index_put _index_put_impl index_select
    index_add index_copy index_fill gather scatter scatter_add scatter_reduce take take_along_dim masked_scatter topk sort
    argsort max_pool2d_with_indices max_pool3d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool2d_backward adaptive_max_pool3d_backward _embedding_bag
    _embedding_bag_forward_only _embedding_bag_dense_backward _embedding_bag_backward _embedding_bag_per_sample_weights_backward
    bucketize searchsorted one_hot embedding_renorm kthvalue histc bincount isin gather_backward value_selecting_reduction_backward""")
PRODUCTS = words("mm addmm bmm baddbmm mv addmv dot addr")
CONVOLUTIONS = words("convolution convolution_backward")

CLASSES = {**dict.fromkeys(ELEMENTWISE, "elementwise"), **dict.fromkeys(COPIES, "copy"), **dict.fromkeys(REDUCTIONS, "norm"),
           **dict.fromkeys(SOFTMAX, "softmax"), **dict.fromkeys(GATHERS, "gather"), **dict.fromkeys(PRODUCTS, "gemm"),
           **dict.fromkeys(CONVOLUTIONS, "conv"), **dict.fromkeys(words("attention attention_biased"), "attention"),
           **dict.fromkeys(words("attention_backward attention_biased_backward"), "attention_backward"),
           **dict.fromkeys(words("delta_rule delta_rule_backward"), "gemm")}
# Of those, what has a family in model.json's op "activation".
ACTIVATIONS = {"relu": "relu", "silu": "silu", "tanh": "tanh", "sigmoid": "sigmoid"}


def packet(func):
    """"aten::add_.Tensor" -> ("add", True): the name without overload, and whether it writes its first operand."""
    name = func._schema.name.partition("::")[2]
    in_place = name.endswith("_") and not name.endswith("__")
    return (name[:-1] if in_place else name), in_place


def known(func):
    if func.namespace == "shardwright_export":
        return True
    name = packet(func)[0]
    return func.namespace in ("aten", "prims") and (name in VIEWS or name in FREE or name in CLASSES)


def multiplications(func, args, kwargs, out):
    """FLOPs by torch.utils.flop_counter, 0 for what it does not count. Of a grouped convolution's weight gradient the counter takes
    all pairs of channels; what runs is as many products as forward has."""
    if func.namespace == "shardwright_export":
        return attention_flops(func, args)
    if packet(func)[0] == "convolution_backward":
        return convolution_flops(args) * sum(args[10][:2])
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def convolution_flops(args):
    grad, x, weight, transposed = args[0], args[1], args[2], args[7]
    return int(conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed=transposed))


def delta_rule_flops(k, v, inverse):
    """Products of a chunk of C tokens, by value heads: keys with keys, the triangle's inverse (a third of C^3), it with keys and with values;
    the state is read twice and added to; queries with keys, scores with values. Backward runs all but the first two again, and two for each."""
    chunk, rows = inverse.shape[3], inverse.numel() // inverse.shape[3]
    size, value_size = k.shape[3], v.shape[3]
    first = 2 * chunk * size + 2 * chunk * chunk // 3
    rest = 2 * chunk * (size + value_size) + 6 * size * value_size + 2 * chunk * (size + value_size)
    return rows * (first + rest), rows * (2 * first + 3 * rest)


def attention_flops(func, args):
    """The counter's formulas of the flash kernels: two products forward; backward five, the scores once more among them."""
    name = func._schema.name.partition("::")[2]
    backward = name.endswith("_backward")
    if name == "delta_rule":
        return delta_rule_flops(args[1], args[2], args[3].unsqueeze(-1).expand(*args[3].shape, args[5]))[0]
    if name == "delta_rule_backward":
        return delta_rule_flops(args[2], args[3], args[8])[1]
    if name.removesuffix("_backward") not in ("attention", "attention_biased"):
        return 0
    q, k, v = args[1:4] if backward else args[:3]
    size, value_size = q.shape[3], v.shape[3]
    per_score = 3 * size + 2 * value_size if backward else size + value_size
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * per_score


ITEM = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}
