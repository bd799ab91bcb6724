# %% [markdown]
# # Look at runs in a notebook
# Open this file in Jupyter or VS Code: each `# %%` is a cell. It reads the runs of `smoothcert quickstart`: run that
# first, in the folder of this notebook, or change RUNS to the folders of your own runs.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import smoothcert as sc

RUNS = sorted(Path("quickstart/runs").iterdir())
IMAGES, VOTES = 100, 1_000

# %% [markdown]
# ## The table of all runs
# `pandas.DataFrame(table)` shows it better, if pandas is installed.

# %%
table = sc.report(RUNS, radii=(0, 0.5, 1))
for row in table:
    print(f"{row['name']:20} sigma {row['sigma']}  ACR {row['acr']:.3f}  at 0.5 {row['certified_accuracy_0.5']:.1%}")

# %% [markdown]
# ## Certify a loader with the network of one run
# The file is continued if this cell is interrupted and run again.

# %%
run = sc.load(RUNS[0])
images, labels = sc.load_dataset(run.recipe.dataset, "test").batch(torch.arange(IMAGES))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=10)
smoothed = sc.SmoothedClassifier(run.model, sigma=run.recipe.sigma)
batches = list(smoothed.certify_loader(loader, n=VOTES, out="notebook/certificates/mine.tsv", progress=True))

# %% [markdown]
# ## Certified accuracy at each radius

# %%
correct = torch.cat([batch.prediction for batch in batches]) == labels
radius = torch.cat([batch.radius for batch in batches])
grid = torch.linspace(0, float(radius.max()), 100, dtype=radius.dtype)
curve = [float((correct & (radius >= r)).double().mean()) for r in grid]
plt.plot(grid, curve, label=RUNS[0].name)
plt.xlabel("L2 radius")
plt.ylabel("certified accuracy")
plt.legend()
plt.savefig("notebook/curve.png")
