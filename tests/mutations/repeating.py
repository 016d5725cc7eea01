"""Faults in what is recorded once for nodes that are alike."""

from __future__ import annotations

from tests.mutations.mutant import mutant

REPEATS = "capture/repeats.py"
ALIKE = "unit/capture/test_repeats.py"

OF_REPEATS = (
    mutant(
        "nodes-are-never-repeated",
        REPEATS,
        "        if key not in self._templates:\n",
        "        if True:\n",
        ALIKE,
    ),
    mutant(
        "the-sign-of-a-zero-is-left-out",
        REPEATS,
        "            return value.hex()  # 0.0 is equal to -0.0\n",
        "            return (kind, value)\n",
        ALIKE,
    ),
    mutant(
        "one-and-true-are-alike",
        REPEATS,
        "            return (kind, value)  # 1 is equal to True\n",
        "            return value\n",
        ALIKE,
    ),
    mutant(
        "named-arguments-are-left-out",
        REPEATS,
        "for k, v in kwargs.items())\n        except",
        "for k, v in ())\n        except",
        ALIKE,
    ),
    mutant(
        "shared-buffers-are-left-out",
        REPEATS,
        "return (self.buffers.index(buffer), description)",
        "return description",
        ALIKE,
    ),
    mutant(
        "gradients-are-left-out",
        REPEATS,
        "return layout_of(tensor), tensor.device, tensor.requires_grad",
        "return layout_of(tensor), tensor.device, False",
        ALIKE,
    ),
    mutant(
        "kinds-of-buffers-are-left-out",
        REPEATS,
        "return tuple((d.kind, d.nbytes,",
        "return tuple((d.nbytes,",
        ALIKE,
    ),
    mutant(
        "templates-survive-a-change-of-state",
        REPEATS,
        "            self._templates.clear()\n",
        "            pass\n",
        ALIKE,
    ),
    mutant(
        "functions-of-others-are-repeated",
        REPEATS,
        "            if not _is_of_torch(target):\n",
        "            if False:\n",
        ALIKE,
    ),
    mutant(
        "constants-are-repeated",
        REPEATS,
        "        if any(d.payload is not None or d.handed is not None for",
        "        if any(False for",
        ALIKE,
    ),
    mutant(
        "a-repeated-change-in-place-is-forgotten",
        REPEATS,
        "            recorder.buffers[buffers[place]].is_written = True\n",
        "            pass\n",
        ALIKE,
    ),
    mutant(
        "repeated-tasks-keep-the-label-of-the-first",
        REPEATS,
        "                label=recorder.label,\n",
        "",
        ALIKE,
    ),
    mutant(
        "an-argument-that-comes-back-is-a-view",
        REPEATS,
        "            if value is tensor:\n",
        "            if False:\n",
        ALIKE,
    ),
    mutant(
        "a-view-in-a-dtype-that-is-not-known-is-repeated",
        REPEATS,
        "        if places[buffer] < num_given and (buffer, value.dtype) not in known:\n",
        "        if False:\n",
        ALIKE,
    ),
    mutant(
        "an-unmade-tensor-is-another-one",
        REPEATS,
        "                unmade.made = base.as_strided(*unmade.form[:3])\n",
        "                same = layout_of(base) == unmade.layout\n"
        "                unmade.made = base if same else base.as_strided(*unmade.form[:3])\n",
        ALIKE,
    ),
    mutant(
        "tensors-that-are-turned-in-place-stay-as-they-are",
        REPEATS,
        "        if list(map(_described, made)) != given.layouts:\n",
        "        if False:\n",
        ALIKE,
    ),
    mutant(
        "an-unmade-tensor-that-is-turned-is-not-followed",
        REPEATS,
        "            _follow(given.tensors)",
        "            pass",
        ALIKE,
    ),
    mutant(
        "an-unmade-buffer-is-not-registered",
        REPEATS,
        "            self._recorder.set_storage(buffer, base)\n",
        "",
        ALIKE,
    ),
    mutant(
        "the-storage-of-a-result-may-be-smaller",
        REPEATS,
        "if view.layout[-1] == 0 and nbytes == drafts[view.place].nbytes:",
        "if view.layout[-1] == 0:",
        ALIKE,
    ),
)
