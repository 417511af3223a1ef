"""Small networks of torchvision and timm, as their packages make them, each with a loss. Without the packages there are none.

They lie in build/networks (scripts/install-python.sh), apart: transformers imports torchvision where it finds it.
"""

import dataclasses
import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent.parent / "build" / "networks"))

CLASSES = 5


@dataclasses.dataclass(frozen=True)
class Sizes:
    side: int = 32  # of an image; tokens are patches of 8 by 8
    width: int = 24  # of a token, two heads


SMALL, WIDE = Sizes(), Sizes(88, 64)  # of WIDE tokens and heads fill the tiles of fused attention


class Classifier(torch.nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, pixel_values, labels):
        return torch.nn.functional.cross_entropy(self.network(pixel_values), labels)


def torchvision_networks(sizes):
    # The compiled operators of a build for GPUs do not load beside torch for CPUs; networks need none of them.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        try:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            pass
    torchvision_networks.library = library
    try:
        from torchvision.models import convnext, densenet, mobilenetv2, regnet, resnet, swin_transformer, vision_transformer
    except ImportError:
        return {}
    blocks = [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 2)]
    return {
        "resnet": lambda: resnet.ResNet(resnet.BasicBlock, [1, 2, 1, 1], num_classes=CLASSES),
        "resnet bottleneck": lambda: resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=16),
        "vision transformer": lambda: vision_transformer.VisionTransformer(sizes.side, 8, 3, 2, sizes.width, 2 * sizes.width,
                                                                              num_classes=CLASSES),
        "convnext": lambda: convnext.ConvNeXt(blocks, num_classes=CLASSES),
        "swin": lambda: swin_transformer.SwinTransformer([2, 2], 12, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0,
                                                         num_classes=CLASSES),
        "densenet": lambda: densenet.DenseNet(4, (2, 2), 8, num_classes=CLASSES),
        "mobilenet": lambda: mobilenetv2.MobileNetV2(CLASSES, 0.25, dropout=0.0),
        "regnet": lambda: regnet.RegNet(regnet.BlockParams([1, 2], [8, 16], [8, 8], [1.0, 1.0], [2, 2], 0.25), num_classes=CLASSES),
    }


def timm_networks(sizes):
    try:
        import timm
    except ImportError:
        return {}
    vit = {"img_size": sizes.side, "patch_size": 8, "embed_dim": sizes.width, "depth": 3, "num_heads": 2}
    settings = {
        "vit_tiny_patch16_224": vit, "deit3_small_patch16_224": vit, "beit_base_patch16_224": vit, "cait_xxs24_224": vit,
        "convnextv2_atto": {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20)},
        "resnet10t": {},
        "ghostnet_050": {"drop_rate": 0.0},
    }
    made = {name: lambda name=name, more=more: timm.create_model(name, num_classes=CLASSES, **more) for name, more in settings.items()}
    mixer = timm.models.mlp_mixer
    blocks = {"mixer": {}, "resmlp": {"mlp_ratio": 4, "block_layer": mixer.ResBlock, "norm_layer": mixer.Affine},
              "gmlp": {"mlp_ratio": 6, "block_layer": mixer.SpatialGatingBlock, "mlp_layer": timm.layers.GatedMlp}}
    for name, more in blocks.items():
        made[name] = lambda more=more: mixer.MlpMixer(CLASSES, img_size=sizes.side, patch_size=8, num_blocks=3, embed_dim=sizes.width, **more)
    return made


def builders(sizes=SMALL):
    """Makers of modules with a loss, by package and name."""
    networks = {f"torchvision {name}": make for name, make in torchvision_networks(sizes).items()}
    networks |= {f"timm {name}": make for name, make in timm_networks(sizes).items()}
    return {name: lambda make=make: Classifier(make()) for name, make in networks.items()}
