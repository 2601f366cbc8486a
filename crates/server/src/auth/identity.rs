//! The identity of a caller: the plain value by which quotas, budgets and fair shares tell callers apart (D-45).

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, LazyLock};

use http::Extensions;
use sapwood_kernel::SteerRights;

use crate::auth::scopes::{KeyScope, Scopes};
use crate::listener::peer::PeerInfo;

/// The owner of quotas, request ids, streams and resume tokens. A type and not a name, because names are chosen by the issuers
/// of keys and certificates, and equal names of different kinds are different callers.
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

    /// Whether this caller, who knows the token, may use what `owner` has created. Without a key the token alone identifies
    /// a caller: its address may have changed.
    pub(crate) fn may_use_what(&self, owner: &Self) -> bool {
        // A client that has changed its network must be able to resume, and the token cannot be guessed (D-45).
        matches!((self, owner), (Self::Anonymous(_), Self::Anonymous(_))) || self == owner
    }

    /// What this caller may steer with these scopes. A key's name is the user; without keys it is `localhost` (AI-902).
    pub(crate) fn steer_rights(&self, scopes: Scopes) -> SteerRights {
        let (user, trusted) = match self {
            Self::Key(name) => (Arc::clone(name), true),
            // With its prefix: a certificate's subject must not be mistaken for the name of a key.
            Self::Certificate(_) => (self.to_string().into(), true),
            // Without keys everybody has all scopes, but controllers are programs: they are managed from this machine.
            Self::Anonymous(network) if is_here(*network) => (LOCALHOST.into(), true),
            Self::Anonymous(_) => (self.to_string().into(), false),
        };
        let has = |scope| trusted && scopes.has(scope);
        SteerRights {
            user,
            is_admin: has(KeyScope::Admin),
            may_control: has(KeyScope::Control),
        }
    }

    /// The number of this caller in a fair share (D-54); never 0, which stands for no caller.
    pub(crate) fn number(&self) -> u64 {
        // Seeded per process: with a fixed hash somebody could choose a name that collides with another caller's and take
        // part of its turns.
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

/// The user of requests from this machine where there are no keys.
const LOCALHOST: &str = "localhost";

/// Whether this is the network of callers on this machine.
fn is_here(network: Option<IpAddr>) -> bool {
    // `None` is a Unix socket. The network of `::1` is that of its first 64 bits, all of them 0.
    network.is_none_or(|network| network.is_loopback() || network == Ipv6Addr::UNSPECIFIED)
}

/// The network that an address belongs to, as one caller.
fn network(address: IpAddr) -> IpAddr {
    // Canonical first: a dual-stack socket shows IPv4 clients as `::ffff:a.b.c.d`, all of which share the first 64 bits.
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_902_scopes_become_rights_to_steer() {
        let key = CallerIdentity::Key("ann".into());
        let anonymous = CallerIdentity::Anonymous(None);
        let certificate = CallerIdentity::Certificate("ann".into());
        let all = Scopes::ALL;
        let scopes = |scopes: &[KeyScope]| scopes.iter().copied().collect();
        for (identity, scopes, expect) in [
            (&anonymous, all, ("localhost", true, true)),
            (&key, scopes(&[KeyScope::Infer]), ("ann", false, false)),
            (
                &key,
                scopes(&[KeyScope::Infer, KeyScope::Control]),
                ("ann", false, true),
            ),
            (&key, scopes(&[KeyScope::Admin]), ("ann", true, false)),
            (
                &certificate,
                scopes(&[KeyScope::Infer]),
                ("certificate:ann", false, false),
            ),
        ] {
            let rights = identity.steer_rights(scopes);
            let found = (&*rights.user, rights.is_admin, rights.may_control);
            assert_eq!(found, expect);
        }
    }
}
