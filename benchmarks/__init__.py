"""Speed, memory and accuracy of implementations: workloads, how they are measured, asv's suites.

asv imports every module of this folder, with the package of whichever commit it looks at, hence modules here
import one another relatively and ask of the package only what `implementations` and `judging` ask. Sub-folders
without an __init__.py are not asv's: `speed/` (pytest-benchmark), `gates/` (two commits compared), `contests/` (ours
beside what a user would pick instead), `gpu/` (for a machine that has one), `studies/` (measurements behind reports/).
"""
