class CostModel: pass
class AcceptanceStats: pass
