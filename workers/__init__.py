"""The processes that run jobs.

agent ──── one per host: claims, records, renews; never imports torch
├── warm ──── torch imported once; forks
│   └── keeper ──── one per unit of a job; holds the devices' locks, ends every descendant
│       └── child ──── runs the unit; sends JSON lines to the agent over a pipe
└── keeper ──── for units that need a new interpreter
    └── child
"""
