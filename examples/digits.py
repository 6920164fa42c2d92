"""Train a small convolutional network on scikit-learn's handwritten digits, on any number of workers.

python examples/digits.py --steps 600                          alone: one process carries everything
virtualflow run --workers 2 examples/digits.py --steps 600     two workers, and the same bits in the end
virtualflow run -f examples/digits.yaml                        the same, as a VirtualFlowJob
"""

import torch
import torch.nn.functional as F

import virtualflow as vf
from arguments import steps_to_make
from digits_task import DigitsNet, correct, digits, parse_arguments


def main() -> None:
    args = parse_arguments(__doc__)
    torch.manual_seed(0)
    train, test = digits()
    steps = steps_to_make(args, len(train))
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    with vf.elastic(model, optimizer, train, batch_size=args.batch_size, steps=steps, scheduler=sched) as run:
        for step in run:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)

        # Then see how it does on digits that it has not learned from.
        hits = vf.evaluate(model, test, lambda batch: correct(model, batch), batch_size=args.batch_size)
        run.log(test_accuracy=hits.mean().item())
        if run.leader:
            print(f"test accuracy {hits.mean():.4f}")


if __name__ == "__main__":
    main()
