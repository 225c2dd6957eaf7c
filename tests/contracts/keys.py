"""The key the contract suite opens its doors with."""

from twinbus.protocol.keys import ROOT_KEY, Claim, SharedAccessKey

ROOT = SharedAccessKey(
    name=ROOT_KEY, claims=(Claim.MANAGE,), primary="first" * 8, secondary="second" * 8
)
