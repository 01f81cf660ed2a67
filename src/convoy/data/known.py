"""Published statistics and class names of well-known data sets."""

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

MNIST_CLASSES = [str(digit) for digit in range(10)]
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

# Means and standard deviations of the training pixels, scaled from 0 to 1.
MNIST: Statistics = ((0.1307,), (0.3081,))
CIFAR10: Statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100: Statistics = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

_LUMA = (0.299, 0.587, 0.114)


def statistics(classes: list[str], own: tuple[int, int, int] | None, channels: int) -> Statistics:
    """Mean and standard deviation of each channel for a data set that looks like a known one; else ImageNet's.

    Args:
        classes: names of the classes.
        own: height, width and channels of the stored pictures, if they are all the same.
        channels: channels they are turned into; grey from RGB weighs the three numbers as luma does.
    """
    known = IMAGENET
    if own == (28, 28, 1) and len(classes) == 10:
        known = MNIST
    elif own == (32, 32, 3) and len(classes) in (10, 100):
        known = CIFAR10 if len(classes) == 10 else CIFAR100
    if len(known[0]) == channels:
        return known
    if channels == 3:
        return known[0] * 3, known[1] * 3
    mean, std = (round(sum(w * x for w, x in zip(_LUMA, part, strict=True)), 4) for part in known)
    return (mean,), (std,)
