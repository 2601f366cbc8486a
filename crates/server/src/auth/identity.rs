//! Who a caller is: a plain value by which quotas, budgets and turns tell callers apart (D-45).

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, LazyLock};

use http::Extensions;

use crate::listener::peer::PeerInfo;

/// Whose something is: shares, request ids, streams and resume tokens. A type and not a name, because names are chosen by
/// the issuer of keys and certificates, and equal names of different kinds are different callers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CallerIdentity {
    /// A caller without a key. Only its network is known: of IPv4 the address, of IPv6 the first 64
    /// bits, in which one client has as many addresses as it likes; `None` for a Unix socket.
    Anonymous(Option<IpAddr>),
    /// The key of this name.
    Key(Arc<str>),
    /// A client's certificate with this subject, which no key names.
    Certificate(Arc<str>),
}

impl CallerIdentity {
    /// A caller without a key, at this address.
    #[must_use]
    pub fn anonymous(extensions: &Extensions) -> Self {
        Self::Anonymous(extensions.get().map(|PeerInfo(peer)| network(peer.ip())))
    }

    /// A caller without a key, at this address.
    pub(crate) fn at(address: IpAddr) -> Self {
        Self::Anonymous(Some(network(address)))
    }

    /// Whether what `owner` has made may be used by this caller, who knows its token. Without a key the token is all there
    /// identify a caller by: its address may have changed.
    pub(crate) fn may_use_what(&self, owner: &Self) -> bool {
        matches!((self, owner), (Self::Anonymous(_), Self::Anonymous(_))) || self == owner
    }
}

impl CallerIdentity {
    /// In whose turn the calls of a request wait (D-54): a number for this caller, never 0.
    pub(crate) fn number(&self) -> u64 {
        // Seeded, so that nobody can choose a name that takes another's turns.
        static SEED: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        SEED.hash_one(self).max(1)
    }
}

/// As log lines show it.
impl fmt::Display for CallerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous(_) => f.write_str("anonymous"),
            Self::Key(name) => f.write_str(name),
            Self::Certificate(subject) => write!(f, "certificate:{subject}"),
        }
    }
}

/// The network that an address belongs to, as one caller.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}
