"""Small networks that draft from a target's hidden states: EAGLE and EAGLE-3, Medusa, multi-token prediction."""
