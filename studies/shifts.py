"""The shifts that rules are chosen on, and those that were set aside to judge them.

This list was written before these rules were chosen: which layers are trained, when to trust the witness, the guard,
which classes occur, the estimate of accuracy. A rule may use runs on `CHOOSE`. Its figures are reported on `JUDGE`,
which is run once, after the rule is fixed. Seeds 2019, 2020 and 2021 throughout.
"""

CHOOSE = {
    "office31": "Office-31, six tasks, all 31 classes",
    "office31-10": "Office-31, six tasks, the first 10 of 31 classes in the target",
    "photo-cartoon": "PACS, photographs to cartoons",
    "office31-blur": "Office-31, six tasks, the target heavily blurred",
    "office31-dark": "Office-31, six tasks, the target dark and noisy",
    "mnist-uci": "MNIST (5,000) to UCI digits, network from scratch",
    "toy": "the paper's toy, 2-D, network from scratch",
}

JUDGE = {
    "office31-20": "Office-31, six tasks, the first 20 of 31 classes in the target",
    "cartoon-photo": "PACS, cartoons to photographs",
    "office31-lines": "Office-31, six tasks, the target as line drawings",
    "office31-inverted": "Office-31, six tasks, the target with inverted colours",
    "office31-posterised": "Office-31, six tasks, the target posterised to two levels",
    "uci-mnist": "UCI digits to MNIST (5,000), network from scratch",
    "mnist-usps": "MNIST to USPS, network from scratch",
    "usps-mnist": "USPS to MNIST, network from scratch",
}
