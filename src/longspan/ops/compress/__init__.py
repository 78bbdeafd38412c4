"""Fewer keys or queries: pack a sequence into slots by projection, pooling, landmarks or learned queries; unpack."""
