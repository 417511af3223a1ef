"""Networks as torchvision, timm and diffusers publish them, and text models: each is exported like PyTorch has it or refused in a line.

    python3 tests/models/export_published_networks_test.py SHARDWRIGHT [NAME ...]

Expected: parameters, forward FLOPs of torch's FlopCounterMode, backward FLOPs and kept bytes as in export_model_test.py, at three
batches. REFUSED says of which networks the export must name what it has no words for; any other difference is a failure. Packages beside
torch lie in build/networks (scripts/deep.sh); without one of them its networks are skipped.
"""

import importlib
import pathlib
import sys
import tempfile

try:
    import torch
    from torch import nn
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "build" / "networks")]
import export_model_test  # noqa: E402
from export_model_test import export_model  # noqa: E402

CLASSIFIERS = ("alexnet", "vgg16", "vgg16_bn", "resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d", "densenet121", "squeezenet1_1",
               "googlenet", "inception_v3", "mobilenet_v2", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0", "efficientnet_b0",
               "efficientnet_v2_s", "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t")
SEGMENTATION = ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")
TIMM = ("vit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "xcit_nano_12_p16_224",
        "levit_128", "mixer_s32_224", "resmlp_12_224", "poolformer_s12", "efficientformer_l1", "mobilevit_s", "edgenext_x_small", "convnextv2_atto",
        "convmixer_768_32", "hrnet_w18_small", "ghostnet_100", "repvgg_a0", "tf_efficientnet_lite0", "dm_nfnet_f0", "coatnet_nano_rw_224",
        "fastvit_t8", "res2net50_26w_4s", "resnest14d", "dla34", "pit_ti_224")
# What the export must say of the others.
REFUSED = {"torchvision swin_v2_t": "cpb_mlp.1: relu_ in place on a view", "timm dm_nfnet_f0": "act: relu_ in place on a view", "text LSTM": "cells: LSTM, a loop over the tokens",
           "text GRU": "cells: GRU, a loop over the tokens"}


def images(make, side=224, channels=3, name="x", **more):
    """A network of one image, and other inputs of one sample by shape."""
    def made():
        model = export_model.without_weights(make)
        with torch.device("meta"):
            inputs = {name: torch.zeros(1, channels, *(side if isinstance(side, tuple) else (side, side)))}
            return model, inputs | {key: torch.zeros(1, *shape) for key, shape in more.items()}, 0
    return made


def torchvision_networks():
    # The compiled operators of a build for GPUs do not load beside torch for CPUs; networks need none of them.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        try:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            pass
    torchvision_networks.library = library
    models = importlib.import_module("torchvision.models")
    backbones = importlib.import_module("torchvision.models.detection.backbone_utils")
    made = {name: images(lambda n=name: getattr(models, n)(weights=None), {"inception_v3": 299, "swin_v2_t": 256}.get(name, 224))
            for name in CLASSIFIERS}
    made |= {name: images(lambda n=name: getattr(models.segmentation, n)(weights=None, weights_backbone=None), 256) for name in SEGMENTATION}
    made |= {name: images(lambda n=name: getattr(models.video, n)(weights=None), (16, 224, 224) if name == "s3d" else (16, 112, 112)) for name in VIDEO}
    made["backbone of Faster R-CNN"] = images(lambda: backbones.resnet_fpn_backbone(backbone_name="resnet50", weights=None, trainable_layers=5), 256)
    made["backbone of SSDlite"] = images(
        lambda: backbones.mobilenet_backbone("mobilenet_v3_large", weights=None, fpn=True, trainable_layers=6), 256)
    return {f"torchvision {name}": make for name, make in made.items()}


def timm_networks():
    timm = importlib.import_module("timm")
    sides = {"convmixer_768_32": 224}
    return {f"timm {name}": images(lambda n=name: timm.create_model(n), sides.get(name, timm.get_pretrained_cfg(name).input_size[1]))
            for name in TIMM}


def diffusers_networks():
    diffusers = importlib.import_module("diffusers")
    small = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}

    def unet():
        return diffusers.UNet2DModel(sample_size=32, **small, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                     up_block_types=("AttnUpBlock2D", "UpBlock2D"))

    def conditioned():
        return diffusers.UNet2DConditionModel(sample_size=32, **small, cross_attention_dim=48, attention_head_dim=8,
                                              down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                                              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))

    def transformer():
        return diffusers.DiTTransformer2DModel(num_attention_heads=4, attention_head_dim=16, num_layers=2, sample_size=16, in_channels=4,
                                               num_embeds_ada_norm=100)

    def pixart():
        return diffusers.PixArtTransformer2DModel(num_attention_heads=4, attention_head_dim=16, num_layers=2, sample_size=16, cross_attention_dim=64,
                                                  caption_channels=48, use_additional_conditions=False)

    def autoencoder():
        return diffusers.AutoencoderKL(**small, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)

    def called(make, channels, side, **shapes):
        whole = images(make, side, channels, "sample" if make is not transformer and make is not pixart else "hidden_states", **shapes)

        def made():
            model, inputs, length = whole()
            for name in ("timestep", "class_labels"):
                if name in inputs:
                    inputs[name] = torch.zeros(1, dtype=torch.long, device="meta")
            return model, inputs, length
        return made

    return {"diffusers UNet2DModel": called(unet, 3, 32, timestep=()),
            "diffusers UNet2DConditionModel": called(conditioned, 4, 32, timestep=(), encoder_hidden_states=(20, 48)),
            "diffusers DiTTransformer2DModel": called(transformer, 4, 16, timestep=(), class_labels=()),
            "diffusers PixArtTransformer2DModel": called(pixart, 4, 16, encoder_hidden_states=(20, 48), timestep=()),
            "diffusers AutoencoderKL": called(autoencoder, 3, 32)}


class TextConvolutions(nn.Module):
    """Kim's classifier: convolutions of three widths over the words, the largest of each."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.wide = nn.ModuleList(nn.Conv1d(64, 32, width) for width in (3, 4, 5))
        self.out = nn.Linear(96, 4)

    def forward(self, input_ids):
        x = self.words(input_ids).transpose(1, 2)
        return self.out(torch.cat([torch.relu(layer(x)).amax(-1) for layer in self.wide], 1))


class GatedConvolutions(nn.Module):
    """A language model of causal gated convolutions."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(nn.Conv1d(64, 128, 4, dilation=2 ** i) for i in range(3))
        self.out = nn.Linear(64, 500)

    def forward(self, input_ids):
        x = self.words(input_ids).transpose(1, 2)
        for layer in self.layers:
            x = x + nn.functional.glu(layer(nn.functional.pad(x, (3 * layer.dilation[0], 0))), 1)
        return self.out(x.transpose(1, 2))


class Recurrent(nn.Module):
    """A tagger of a bidirectional LSTM or GRU."""

    def __init__(self, kind):
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.cells = kind(64, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, 9)

    def forward(self, input_ids):
        return self.out(self.cells(self.words(input_ids))[0])


class BagOfWords(nn.Module):
    """fastText's classifier."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.out = nn.Linear(64, 4)

    def forward(self, input_ids):
        return self.out(self.words(input_ids).mean(1))


def text_networks():
    def of(make):
        def made():
            with torch.device("meta"):
                return make(), {"input_ids": torch.zeros(1, 48, dtype=torch.long)}, 48
        return made

    return {"text convolutions": of(TextConvolutions), "text gated convolutions": of(GatedConvolutions), "text bag of words": of(BagOfWords),
            "text LSTM": of(lambda: Recurrent(nn.LSTM)), "text GRU": of(lambda: Recurrent(nn.GRU))}


def outcome(program, path, make):
    """"exact", "refused: ..." or what is wrong."""
    try:
        model, inputs, length = make()
        found = export_model_test.problems_of(program, path, model, inputs, length)
    except export_model.Unsupported as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001  a traceback is never the answer
        return f"WRONG {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"WRONG {found[:3]}" if found else "exact"


def main(arguments):
    program = str(pathlib.Path(arguments[0]).resolve())
    networks, skipped = {}, []
    for package in (torchvision_networks, timm_networks, diffusers_networks, text_networks):
        try:
            networks |= package()
        except ImportError as missing:
            skipped.append(str(missing))
    totals, good = {"exact": 0, "refused": 0}, True
    with tempfile.TemporaryDirectory() as folder:
        for name, make in networks.items():
            if arguments[1:] and name not in arguments[1:]:
                continue
            found = outcome(program, pathlib.Path(folder) / "network.json", make)
            as_promised = found == "exact" if name not in REFUSED else found.startswith("refused: ") and REFUSED[name] in found
            totals[found.partition(":")[0]] = totals.get(found.partition(":")[0], 0) + 1
            print(f"{'' if as_promised else 'FAILED '}{name}: {found}", flush=True)
            good &= as_promised
    print(f"{sum(totals.values())} networks: {totals['exact']} exact, {totals['refused']} refused{'; skipped: ' + ', '.join(skipped) if skipped else ''}")
    return (77 if skipped else 0) if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
